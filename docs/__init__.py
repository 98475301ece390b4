"""The pages and the programs that write their generated blocks and plots."""
