"""Stores of the bytes of pages: DRAM, NVMe, memory of devices, and memory of other processes. Without decisions."""
