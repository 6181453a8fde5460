# Two images of one distribution: `services` without torch, `trainer` with torch and verl.
FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY schemas schemas
COPY services services
COPY trainer trainer

FROM base AS services
RUN pip install -c constraints.txt ".[demo]"
COPY examples examples
RUN useradd --create-home turnfold
USER turnfold
ENTRYPOINT ["turnfold"]

FROM base AS trainer
# Before the extra: a range would take another build.
ARG TORCH=torch==2.13.0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install "$TORCH" && pip install -c constraints.txt ".[train]"
ENTRYPOINT ["turnfold"]
