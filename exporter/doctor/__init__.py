"""`poolmeter doctor`: what is missing on this node and how to fix it. It only looks, and changes nothing."""
