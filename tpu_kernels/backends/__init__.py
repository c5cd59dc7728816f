"""Where operators run: CPU, the simulated ``"tpu"`` device, the real one."""
