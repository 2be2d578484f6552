"""Kernels written in Pallas: `tpu` for TPUs, `mosaic_gpu` for Hopper GPUs."""
