"""Reports for people: pages, charts and tables of runs, explanations, profiles, DGraphs and meshes."""
