"""The page in a headless browser, against a real cluster."""
