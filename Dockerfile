# Arborist and the SGLang servers that it starts, for machines with NVIDIA GPUs and drivers for CUDA 13:
#
#     mkdir -p runs && docker build --build-arg USER_ID="$(id -u)" -t arborist .
#     docker run --rm -it --init --gpus all --shm-size 16g -v "$PWD/runs:/arborist/runs" arborist make quickstart
#
# Promises: trainer and servers have environments of their own, as on any machine; nothing runs as root; what fixes
# results has a version (tests/docs/test_deployment.py compares them with those the repository names elsewhere).
# The tag says what it is, the digest that it stays so. With nvcc, by which SGLang's kernels are compiled as they are needed.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Triton compiles against Python's headers; SGLang's kernels want libnuma. The distribution drops old versions of packages
# when it mends them, so that a build that names them soon fails.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Whose files those in mounted folders are. Ubuntu has a user 1000 of its own, which may stay.
ARG USER_ID=1000
RUN test "$USER_ID" -ne 0 \
    && useradd --non-unique --create-home --uid "$USER_ID" arborist \
    && install --directory --owner arborist /arborist /opt/sglang
USER $USER_ID
ENV HOME=/home/arborist

# Servers: the versions of `make sglang`, with the CUDA packages that sglang's metadata ask for. CUDA builds of torch bring a
# Triton of their own.
COPY datamodules/inference/sglang/server/requirements.txt datamodules/inference/sglang/server/wheels.txt /tmp/server/
RUN python3 -m venv /opt/sglang \
    && grep -v '^triton==' /tmp/server/requirements.txt > /tmp/server/constraints.txt \
    && /opt/sglang/bin/pip install -c /tmp/server/constraints.txt -r /tmp/server/wheels.txt
ENV ARBORIST_SGLANG_PYTHON=/opt/sglang/bin/python

# The trainer, by the Makefile's own rule, so that every `make` in the container finds its environment.
WORKDIR /arborist
COPY --chown=arborist . .
ARG TORCH="torch==2.13.0 transformers==5.24.0"
RUN make .venv/.installed TORCH="$TORCH"
ENV PATH=/arborist/.venv/bin:$PATH

CMD ["arborist", "--help"]
