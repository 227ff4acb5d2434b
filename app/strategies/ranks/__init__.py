"""How ranks meet, talk to each other, and notice that one is gone."""
