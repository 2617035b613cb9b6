# gptfit with CUDA's torch, for a Linux host with the NVIDIA container toolkit:
#   docker build -t gptfit .
#   docker run --rm --gpus all -v "$PWD:/work" gptfit train configs/mine.py
# The C compiler is what torch.compile needs at run time.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY configs /src/configs
COPY gptfit /src/gptfit
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[train]"
WORKDIR /work
ENTRYPOINT ["gptfit"]
CMD ["--help"]
