import sys

from jaxgen.cli import main

sys.exit(main())
