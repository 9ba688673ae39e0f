"""How models are shown tools and call them: call formats are recognised, constrain answers, and are found in
answers."""
