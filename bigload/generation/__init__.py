"""From a checkpoint to an answer: models of transformers dispatched by a plan, prompts, text. Nothing here prints."""
