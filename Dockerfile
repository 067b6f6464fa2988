# Duet in a container: docs/docker.md says how to build and run it.
# Any base with Python 3.11 or later, its venv module and useradd will do; the CUDA libraries come as packages.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Empty: the registry's CUDA packages, which run on CPUs too. An index with CPU builds: small, CPU only.
ARG TORCH_INDEX_URL=
# For people behind mirrors; empty means pip's own defaults. PIP_CERT is a path inside the base image.
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_TRUSTED_HOST=
ARG PIP_CERT=

# On GPUs torch.compile's Triton calls a C compiler, which slim images lack.
RUN [ -n "$TORCH_INDEX_URL" ] || command -v gcc >/dev/null || { \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }

# The packages change rarely and take minutes; they come before the code, so that a change of code keeps their layer.
COPY requirements.lock docker/install.sh /tmp/duet/
RUN sh /tmp/duet/install.sh /tmp/duet/requirements.lock /opt/venv

RUN useradd --create-home --uid 1000 duet \
    && mkdir -p /app /runs /data \
    && ln -s /runs /app/runs \
    && chown duet /runs /data
WORKDIR /app
COPY . .

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MPLBACKEND=Agg \
    MPLCONFIGDIR=/tmp/matplotlib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER duet
VOLUME ["/runs", "/data"]
ENTRYPOINT ["/bin/sh", "/app/docker/entrypoint.sh"]
