"""Files that run in the environments of other projects, through the bridge. They import nothing of attest."""
