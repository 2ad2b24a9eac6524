# An image with pagerunner and everything that it was tested with.
#
#   docker build -t pagerunner .                                  with CUDA, for NVIDIA GPUs
#   docker build -t pagerunner:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 -e PAGERUNNER_API_KEY=secret pagerunner:cpu serve demo --host 0.0.0.0
FROM python:3.12-slim-bookworm

# Triton compiles a small launcher in C for each kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/pagerunner
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src

# The torch that the figures in docs/performance.md were measured with, and the Triton that it asks for; everything else is
# as pinned. An index with CPU builds (TORCH_INDEX) saves the 3 GB of CUDA.
ARG TORCH_VERSION=2.11.0
ARG TORCH_INDEX=""
RUN grep --extended-regexp --invert-match '^(torch|triton)==' constraints.txt > pins.txt \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir --constraint pins.txt "torch==${TORCH_VERSION}" .

RUN useradd --create-home --uid 1000 pagerunner && install --directory --owner pagerunner /models
USER pagerunner
WORKDIR /home/pagerunner

# Downloads, and compiled kernels: on a volume, so that the second start is quick.
ENV HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/models/triton \
    PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000

# A server that loads a large model for ten minutes is healthy.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# Inside a container only the container's own address can be published. Give it a key: without one everybody whom the
# port is published to may generate.
ENTRYPOINT ["pagerunner"]
CMD ["serve", "demo", "--host", "0.0.0.0"]
