"""Tool calls as models write them, beside their template's own form: found, mended and checked. Computation only."""
