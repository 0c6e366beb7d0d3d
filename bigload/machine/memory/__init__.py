"""RAM of this machine and of this process, and buffers in huge pages."""
