"""Which models there are, which are loaded, and who waits for one."""
