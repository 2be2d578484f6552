"""A call on the devices of a mesh: explicit meshes, automatic meshes, and functions from whole arrays."""
