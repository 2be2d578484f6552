"""Operations: attention as model code calls it, above the kernels. `MaskInfo` describes who sees whom."""

from attest.kernels.masks.mask_info import MaskInfo

__all__ = ["MaskInfo"]
