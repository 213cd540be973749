"""Tables of timings that other projects made: their formats, import and export."""
