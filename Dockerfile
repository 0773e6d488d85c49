# docker build -t mtp-research .                                                 torch for the CPU
# docker build -t mtp-research --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# docker run --rm -v "$PWD:/work" mtp-research eval spec.k=3                      add --gpus all with CUDA
#
# Written without a machine that can build it: nobody has run this file yet.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
ARG EXTRAS=train,report

# Triton compiles its launcher with a C compiler where there is a GPU.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

# In a layer of its own: it is large and changes least.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH_VERSION"

# The pins that are tested; torch and uv are not taken from there.
COPY . /src
RUN grep -vE '^(torch|triton|uv)==' /src/requirements.lock > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[$EXTRAS]" \
    && rm -rf /src /tmp/constraints.txt

RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["mtp"]
CMD ["--help"]
