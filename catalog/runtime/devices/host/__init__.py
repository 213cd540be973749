"""The host CPU as a device."""
