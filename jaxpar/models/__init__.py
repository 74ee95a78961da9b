"""Models that come with jaxpar; each is an ordinary user of `jaxpar.parallelize`."""
