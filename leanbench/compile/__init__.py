"""From kernel source to a binary and the resources of a CTA; needs no GPU."""
