"""Triton kernels. Every public function here has a torch twin of the same name and signature; see ops/dispatch.py.

Each kind of layer has a folder: `linear`, `moe`, `paged` (keys and values), `latent` (MLA, chosen and compressed latents), `recurrent`, `lora`; `sampling`
is what follows the logits. Beside the folders is what several of them need.
"""
