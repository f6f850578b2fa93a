"""Time, bytes and error of settings, on the devices of this process or of several."""
