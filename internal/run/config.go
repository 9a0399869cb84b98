// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/fairlead/fairlead/internal/peer"
	"github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// DefaultFile is the configuration that is read if no other is named.
const DefaultFile = "/etc/fairlead/run.yaml"

// Config is the configuration of the service.
type Config struct {
	Socket  string        // path of the socket for clients
	Control string        // path of the agent's control socket
	Jobs    int           // programs at the same time, of all clients together, 1 to 1024
	Limits  peer.Limits   // of each client
	Allow   policy.Policy // nothing is run if it is empty

	text []byte // of which it was read
}

// Same reports whether two configurations are equal in all but what may be run.
func (c Config) Same(other Config) bool {
	return c.Socket == other.Socket && c.Control == other.Control && c.Jobs == other.Jobs && c.Limits == other.Limits
}

// Load reads the configuration. The error joins all mistakes, with their positions.
func Load(path string) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	return parse(path, data)
}

func parse(path string, data []byte) (Config, error) {
	c := Config{Socket: DefaultSocket, Control: "/run/fairlead/control.sock", Jobs: 16, Limits: peer.Limits{Uses: 8, Requests: 10}, text: data}
	root, err := yamltree.Parse(path, data)
	if err != nil || root.IsNull() {
		return c, err
	}
	entries, err := root.Map("socket", "control", "jobs", "clientJobs", "clientRequests", "allow")
	errs := []error{err}
	for _, e := range entries {
		switch e.Key {
		case "socket":
			err = setPath(&c.Socket, e.Node)
		case "control":
			err = setPath(&c.Control, e.Node)
		case "jobs":
			err = setNumber(&c.Jobs, e.Node)
		case "clientJobs":
			err = setNumber(&c.Limits.Uses, e.Node)
		case "clientRequests":
			err = setNumber(&c.Limits.Requests, e.Node)
		case "allow":
			c.Allow, err = policy.Parse(e.Node)
		}
		errs = append(errs, err)
	}
	return c, errors.Join(errs...)
}

func setPath(to *string, n yamltree.Node) error {
	s, err := n.Text()
	if err == nil && !filepath.IsAbs(s) {
		err = n.Errorf("%q: want an absolute path", s)
	}
	*to = s
	return err
}

func setNumber(to *int, n yamltree.Node) error {
	s, err := n.Text()
	if err != nil {
		return err
	}
	if *to, err = strconv.Atoi(s); err != nil || *to < 1 || *to > 1024 {
		return n.Errorf("%q: want a number from 1 to 1024", s)
	}
	return nil
}

// watchInterval is the time between two looks at the configuration.
const watchInterval = 3 * time.Second

// Watch calls changed with each configuration of a file that differs from the last one, which
// is was at first, or with why it cannot be read, until ctx ends. It looks at once, and calls
// changed, when it is told to.
func Watch(ctx context.Context, path string, was Config, now <-chan os.Signal, changed func(Config, error)) {
	last, failed := was.text, error(nil)
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		told := false
		select {
		case <-ctx.Done():
			return
		case <-now:
			told = true
		case <-tick.C:
		}
		data, err := os.ReadFile(path)
		switch {
		case err != nil && (told || failed == nil):
			changed(Config{}, fmt.Errorf("read configuration: %w", err))
		case err == nil && (told || failed != nil || !bytes.Equal(data, last)):
			changed(parse(path, data))
		}
		last, failed = data, err
	}
}
