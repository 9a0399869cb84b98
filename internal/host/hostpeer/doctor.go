// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/explain"
	"github.com/fairlead/fairlead/internal/status/version"
)

// PairHint says how a host gets the token of a guest. It goes with an error that names the file.
func PairHint(cfg *config.Host, g config.Guest) string {
	command := explain.PairCommand(g.Name)
	if initial := config.DefaultHost(); cfg.TokenFile(g) != initial.TokenFileFor(g.Name) {
		command += " --link-token " + cfg.TokenFile(g)
	}
	where := ""
	if runtime.GOOS != "windows" { // where it is WSL
		where = " with --libvirt, --ssh or another flag that says where the guest is"
	}
	return "fetch it from the guest: `" + command + "`" + where
}

// Facts collects what doctor judges about this host, of the host peer at the control
// socket; by default at that of the configuration.
func Facts(ctx context.Context, configFile, control string) doctor.HostFacts {
	f := doctor.HostFacts{OS: runtime.GOOS, Version: version.String(), Now: time.Now()}
	cfg, err := loadHost(configFile)
	client := status.NewClient(cmp.Or(control, cfg.Control))
	running, settingsErr := client.Settings(ctx) // a host peer of another version may not report them
	if settingsErr == nil && configFile == "" && running.Role == "host" && running.File != "" {
		configFile = running.File
		cfg, err = loadHost(configFile)
	}
	if err != nil {
		f.Config.File, f.Config.Error = configFile, err.Error()
	} else {
		f.Config, f.Pair = examineConfig(&cfg)
		f.Keep = cfg.KeepPrivileges && runtime.GOOS == "linux"
	}
	l, err := client.List(ctx)
	if err != nil {
		f.HostError = err.Error()
	} else {
		describeList(&f, l)
		f.Names = nameListeners(ctx, client)
	}
	ranges, err := host.ReservedPorts(ctx)
	if err == nil { // else the ranges are named when a port needs one
		for _, r := range ranges {
			f.Reserved = append(f.Reserved, r.String())
		}
	}
	if runtime.GOOS == "windows" {
		f.Relay = readRelay()
	}
	return f
}

// loadHost reads a configuration. With an error it returns the defaults.
func loadHost(file string) (config.Host, error) {
	cfg, err := config.LoadHost(file, nil, os.LookupEnv)
	if err != nil {
		return config.DefaultHost(), err
	}
	return cfg, nil
}

// examineConfig describes the configuration, and says how a token that cannot be read is
// fetched. Of several tokens it describes the first, or the first that cannot be read.
func examineConfig(cfg *config.Host) (c doctor.Config, pair string) {
	c = doctor.Config{File: cfg.File(), Rules: cfg.Rules.Len()}
	for _, g := range cfg.Peers() {
		file := cfg.TokenFile(g)
		if file == "" {
			continue
		}
		_, err := link.LoadToken(file)
		if c.TokenFile == "" || err != nil {
			c.TokenFile, pair = file, PairHint(cfg, g)
		}
		if err != nil {
			c.TokenError = err.Error()
			break
		}
	}
	return c, pair
}

// describeList takes over what a running host peer reported.
func describeList(f *doctor.HostFacts, l status.List) {
	for _, p := range l.Publications {
		if p.Unpublished {
			if f.Unpublished == nil {
				f.Unpublished = make(map[string]int)
			}
			f.Unpublished[p.Reason]++
		}
	}
	l = l.Published()
	f.Running, f.Ports = cmp.Or(l.Version, "of an unknown version"), status.Ports(l.Publications)
	for _, p := range l.Peers {
		f.Guests = append(f.Guests, doctor.Guest{
			Endpoint: p.Endpoint, Label: p.Label(), Name: p.Name, Version: p.Version, Connected: p.State == status.PeerConnected, Error: p.Error,
			Code: p.Code, Remote: p.Remote, Since: p.Since,
		})
	}
	for _, p := range l.Publications {
		in := func(s port.State) int {
			return slices.IndexFunc(p.Outcomes, func(o status.Outcome) bool { return o.State == s })
		}
		slot := p.Key.Slot().String()
		if i := in(port.Conflict); i >= 0 { // others may get the program that has it
			f.Conflicts = append(f.Conflicts, doctor.Conflict{Port: slot, Reason: p.Outcomes[i].Reason, Code: p.Outcomes[i].Code})
		} else if i := in(port.Failed); i >= 0 && in(port.Active) < 0 { // a host may lack IPv6
			f.Failed = append(f.Failed, doctor.Conflict{Port: slot, Reason: p.Outcomes[i].Reason, Code: p.Outcomes[i].Code})
		}
	}
}

// nameListeners returns those of a running host peer, none if it does not answer.
func nameListeners(ctx context.Context, client *status.Client) (list []doctor.NameListener) {
	r, err := client.Names(ctx)
	if err != nil {
		return nil
	}
	for _, l := range r.Listeners {
		list = append(list, doctor.NameListener{Protocol: l.Protocol, At: l.Address, Open: l.Open, Error: l.Error})
	}
	return list
}

// readRelay reads from .wslconfig whether WSL's own relay forwards ports.
func readRelay() *doctor.Relay {
	home, err := os.UserHomeDir()
	if err != nil {
		return &doctor.Relay{Error: err.Error()}
	}
	r := &doctor.Relay{File: filepath.Join(home, ".wslconfig"), Forward: true}
	file, err := os.Open(r.File)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r
	case err != nil:
		r.Error = err.Error()
		return r
	}
	defer func() { _ = file.Close() }()
	if r.Forward, err = relays(file); err != nil {
		r.Error = err.Error()
	}
	return r
}

// relays reports whether a .wslconfig leaves localhostForwarding on. In mirrored mode it
// has no effect.
func relays(r io.Reader) (bool, error) {
	on, section := true, ""
	s := bufio.NewScanner(r)
	for s.Scan() {
		line := strings.ToLower(strings.TrimSpace(strings.TrimPrefix(s.Text(), "\ufeff")))
		if strings.HasPrefix(line, "[") {
			section = line
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if section == "[wsl2]" && (key == "localhostforwarding" && value == "false" || key == "networkingmode" && value == "mirrored") {
			on = false
		}
	}
	return on, s.Err()
}
