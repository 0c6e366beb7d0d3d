"""Forms on disk: rewrite a checkpoint so that every device reads only its own bytes. Needs no torch."""
