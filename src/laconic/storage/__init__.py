"""Files on disk: atomic writes, manifests, locks, run directories, untrusted JSON."""
