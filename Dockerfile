# laconic serve in a container; see docs/deploy.md.
FROM python:3.11-slim
ARG EXTRAS=serve,hf,gguf
WORKDIR /app
COPY constraints.txt requirements-hashed.txt ./
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements-hashed.txt
# The CPU build of torch; for CUDA remove the index, and use an image with drivers.
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY dist/*.whl ./
RUN pip install --no-cache-dir -c constraints.txt "$(ls /app/laconic-*.whl)[${EXTRAS}]" && rm /app/*.whl
RUN useradd --create-home laconic
USER laconic
ENV LACONIC_CACHE=/home/laconic/cache
EXPOSE 8000
# A server on all addresses needs LACONIC_API_KEY; without it, it stops with exit code 77.
ENTRYPOINT ["laconic"]
CMD ["serve", "stories260k", "--host", "0.0.0.0"]
