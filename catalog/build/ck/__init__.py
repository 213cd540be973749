"""Rows of AMD arches: translation units from the user's CK checkout, and the HIP compilers of this machine."""
