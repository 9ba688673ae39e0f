"""Commands on machines: join and leave a cluster, lead it, certificates, services of the system."""
