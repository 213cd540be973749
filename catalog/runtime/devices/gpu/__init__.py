"""What GPUs of all vendors have in common."""
