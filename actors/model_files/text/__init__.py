"""What a model's folder says of its text: tokenizers and their repairs, tokens that end an answer, infill, grammars."""
