"""`draftline-server distill`: makes a draft head for a target model."""
