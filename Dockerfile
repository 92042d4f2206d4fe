# videotune with its studio. For a GPU: docker build -t videotune . ; for a CPU, to try it with the toy base model:
#   docker build -t videotune:cpu --build-arg BASE=ubuntu:24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
ARG BASE=nvidia/cuda:12.8.1-base-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH

# a compiler and Python's headers: torch.compile builds its kernels at run time
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin videotune \
    && mkdir /data && chown videotune /data

WORKDIR /src
COPY requirements.lock ./
RUN pip install --index-url "${TORCH_INDEX}" "$(sed -n 's/^# torch==/torch==/p' requirements.lock)" \
    && sed '/^# for development/,$d' requirements.lock > runtime.txt \
    && pip install --require-hashes --no-deps -r runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY videotune videotune
RUN pip install --no-deps --no-build-isolation .

USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 7860
HEALTHCHECK CMD ["videotune", "--version"]
ENTRYPOINT ["videotune"]
CMD ["studio", "--root", "/data", "--host", "0.0.0.0"]
