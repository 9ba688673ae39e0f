"""Calls between actors. A method is declared once (`spec`); how it is called (`client`) and what the actor does with
the bytes that arrive (`shell`) follow from that. Knows no messages. Pure, but for client and local."""
