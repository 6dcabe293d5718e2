# start_llm on Linux. CPU:   docker build -t start-llm .
#                     CUDA:  docker build -t start-llm --build-arg MLX=cuda13 .
# Run (with --gpus all on CUDA):  docker run -p 8080:8080 -e API_KEY=choose-one -v start-llm:/data start-llm
# Models and stored KV are kept in the volume /data. On a Mac run it without Docker: a container has no Metal.
FROM python:3.12-slim-bookworm

# MLX compiles its CPU kernels with this compiler when it runs, and start_llm its bridge to OpenBLAS.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG MLX=cpu
WORKDIR /src
COPY pyproject.toml MANIFEST.in requirements.txt constraints.txt README.md LICENSE ./
COPY start_llm start_llm
# The requirements ask for mlx[cpu]. Both back ends are files of the same names, so the other one takes its place.
RUN pip install --no-cache-dir ".[vision]" -c constraints.txt \
    && if [ "$MLX" != cpu ]; then \
        version=$(pip show mlx | sed -n 's/^Version: //p') \
        && pip uninstall -y mlx-cpu \
        && pip install --no-cache-dir "mlx[$MLX]==$version"; \
    fi \
    && rm -rf /src/*

# The bridge is compiled into the installation at the first start, so the user has to own that folder.
RUN useradd --create-home --uid 10001 llm \
    && mkdir -p /data /usr/local/lib/start_llm \
    && chown llm /data /usr/local/lib/start_llm
USER llm
WORKDIR /data
VOLUME /data
ENV START_LLM_CACHE_DIR=/data/cache \
    LOG_ROOT=/data/logs \
    HF_HOME=/data/huggingface \
    MLX_HOST=0.0.0.0 \
    PROXY=off
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# Listening beyond loopback needs API_KEY (or ALLOW_OPEN_BIND=true): without one the start is refused, and says so.
ENTRYPOINT ["start-llm"]
CMD ["serve"]
