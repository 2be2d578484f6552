"""Kernels written in Pallas: `kernels.pallas.tpu` for TPUs."""
