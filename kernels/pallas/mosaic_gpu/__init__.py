"""Flash attention for Hopper GPUs in Pallas Mosaic GPU: the forward pass.

Its backward pass is not written yet, so the project does not offer it to users: there is no `flash_attention`
here, and no subject. `launch.forward` is what a `kernels.flash.Passes` will take.
"""
