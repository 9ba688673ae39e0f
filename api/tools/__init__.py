"""How models are told of tools and call them: a format of calls is recognised, binds answers, and is found in them."""
