"""Triton kernels. Every public function here has a torch twin of the same name and signature; see ops/dispatch.py."""
