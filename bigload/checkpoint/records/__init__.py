"""Files that bigload writes beside a checkpoint: its manifest, what it is a part of, its base, and fingerprints."""
