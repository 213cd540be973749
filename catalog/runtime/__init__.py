"""What happens to a problem: its tensors, the row that answers it, the launch, the reference it is checked against."""
