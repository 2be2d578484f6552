"""Kernels written in Pallas: `kernels.pallas.tpu` for TPUs, `kernels.pallas.mosaic_gpu` for Hopper GPUs."""
