"""One torch thread for every test: the models are tiny, and two threads on two busy cores wait for each other."""

from __future__ import annotations

import os
import shutil
import signal

if shutil.which("nvidia-smi") is None:  # Triton reads this when it is imported: kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every httpx client reads all certificates of the system, 40 ms a time, and here is a folder without any. No test uses TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

# A shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings  # noqa: E402 - torch reads the variables above when a test module imports it

settings.register_profile("machine", deadline=None)  # a loaded machine is not a failing test
settings.load_profile("machine")
