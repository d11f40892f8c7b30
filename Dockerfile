# docker build -t fsdp-cp .                      # or with Transformer Engine, compiled here: --build-arg TE=1
# docker run --gpus all --ipc=host -v /ckpt:/ckpt -v "$PWD/runs:/srv/fsdp-cp/runs" fsdp-cp \
#     torchrun --standalone --nproc-per-node 8 train.py experiment=... teacher.checkpoint=/ckpt/...
#
# The container's user has uid 10001 and must be able to write the mounted runs/.
#
# torch 2.13.0 of PyPI is built for CUDA 13.0 and brings CUDA, cuDNN and NCCL as wheels. The base image therefore holds
# no CUDA libraries of its own beyond cudart: those of a `runtime` image come first in LD_LIBRARY_PATH and shadow them.
ARG CUDA=13.0.3
ARG UBUNTU=24.04
ARG TE=0

FROM nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU} AS python
# gcc, g++ and the Python headers stay: Triton compiles its launchers at run time, torch.compile its host code
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ gcc libc6-dev python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
# one thread, as torchrun gives: more change the last digits of runs on the CPU. fsdp_cp/launch.py raises it on GPUs where
# an optimizer steps on the host (offload=cpu), unless it is set to another number
ENV PATH=/srv/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1

FROM python AS packages-te0
WORKDIR /build
RUN python3.12 -m venv /srv/venv
COPY pyproject.toml constraints.txt ./
# the dependencies without the project, so that this layer outlives changes of the source; with setuptools, which builds
# the project below without isolation
RUN python -c "import tomllib; t = tomllib.load(open('pyproject.toml', 'rb')); p = t['project']; e = p['optional-dependencies']; print(*t['build-system']['requires'], *p['dependencies'], *e['fp8'], *e['fa4'], *e['wandb'], *e['tensorboard'], sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt

# Transformer Engine's PyTorch half comes as source: it needs nvcc and the headers of CUDA, cuDNN and NCCL.
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu${UBUNTU} AS packages-te1
ARG TE_JOBS=8
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages-te0 /srv/venv /srv/venv
COPY --from=packages-te0 /build /build
WORKDIR /build
ENV PATH=/srv/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    CUDA_HOME=/usr/local/cuda
RUN pip install -c constraints.txt setuptools wheel==0.45.1 cmake==3.31.6 ninja==1.11.1.4 pybind11==2.13.6 \
    && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['te'], sep='\n')" > te.txt \
    && NVTE_FRAMEWORK=pytorch MAX_JOBS=${TE_JOBS} pip install -c constraints.txt --no-build-isolation -r te.txt

FROM packages-te${TE} AS packages

FROM python
COPY --from=packages /srv/venv /srv/venv
RUN useradd --create-home --uid 10001 trainer && install -d -o trainer /srv/fsdp-cp /srv/fsdp-cp/runs
WORKDIR /srv/fsdp-cp
COPY --chown=trainer . .
RUN pip install --no-deps --no-build-isolation -e .
USER 10001
CMD ["torchrun", "--standalone", "--nproc-per-node", "gpu", "train.py"]
