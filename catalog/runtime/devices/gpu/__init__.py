"""The parts that GPUs of all vendors share."""
