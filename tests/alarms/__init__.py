"""Clean kernels written as an outsider would write them, and the instrument that counts false alarms."""
