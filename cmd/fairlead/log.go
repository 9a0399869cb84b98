// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"log/slog"
	"os"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/loglevel"
)

// logger returns the configured logger, and its levels, which can be changed.
func logger(w io.Writer, c config.Common) (*slog.Logger, *loglevel.Levels) {
	levels := loglevel.New(c.LogLevel)
	all := slog.HandlerOptions{Level: slog.LevelDebug} // the levels decide
	var h slog.Handler = slog.NewTextHandler(w, &all)
	if c.LogFormat == "json" {
		h = slog.NewJSONHandler(escaper{w}, &all)
	}
	return slog.New(levels.Handler(h)), levels
}

// warnUnknown warns about environment variables that are misspelt or overridden.
func warnUnknown(log *slog.Logger) {
	environ := os.Environ()
	for _, w := range append(config.UnknownVariables(environ), config.OverriddenVariables(environ)...) {
		log.Warn("environment variable ignored", "reason", w)
	}
}
