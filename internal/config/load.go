// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/yamltree"
)

// LoadAgent merges flags, environment, file and defaults. The file is path, or else
// FAIRLEAD_CONFIG, or else DefaultAgentFile if it exists. Flags is what [Agent.Flags]
// registered with, or nil; only flags of the command line count. Environ is
// os.LookupEnv, or nil for no environment. The error joins all mistakes, with their
// positions; the configuration returned with it is for [Watch] only. Rules in last are
// evaluated after all others.
func LoadAgent(path string, flags *pflag.FlagSet, environ func(string) (string, bool), last ...rules.Rule) (Agent, error) {
	c := DefaultAgent()
	l := newLoader(&c, &c.Common, c.fields(), flags, environ)
	l.last = last
	if err := l.load(path, DefaultAgentFile); err != nil {
		return Agent{Common: Common{files: c.files}}, err
	}
	c.TokenGiven, c.AuditGiven = l.from["linkToken"] != "", l.from["auditInterval"] != ""
	if key, err := c.validate(); err != nil {
		return Agent{Common: Common{files: c.files}}, l.wrap(key, err)
	}
	if err := l.compile("expose", &c.Expose, false); err != nil {
		return Agent{Common: Common{files: c.files}}, err
	}
	c.Rules = c.Rules.WithLabels(c.Labels)
	if path := c.Cluster.Policy; path != "" { // for Watch alone: the agent says what is wrong with it
		data, err := ReadFile(path)
		l.common.files = append(l.common.files, newFile(path, data, err, true))
	}
	c.from = l.from
	return c, nil
}

// LoadHost is LoadAgent for the host peer, with DefaultHostFile.
func LoadHost(path string, flags *pflag.FlagSet, environ func(string) (string, bool)) (Host, error) {
	c := DefaultHost()
	l := newLoader(&c, &c.Common, c.fields(), flags, environ)
	if err := l.load(path, DefaultHostFile()); err != nil {
		return Host{Common: Common{files: c.files}}, err
	}
	c.TokenGiven = l.from["linkToken"] != ""
	if c.Serving.At.Network != "" && l.from["connect"] == "" {
		c.Connect = nil // a host that listens dials what it was told to only
	}
	if key, err := c.validate(); err != nil {
		return Host{Common: Common{files: c.files}}, l.wrap(key, err)
	}
	if err := l.compile("bind", &c.Bind, true); err != nil {
		return Host{Common: Common{files: c.files}}, err
	}
	c.from = l.from
	return c, nil
}

// loader merges the settings of one configuration.
type loader struct {
	config  any // points at the Agent or Host that is filled
	common  *Common
	fields  []field
	flags   *pflag.FlagSet
	environ func(string) (string, bool)
	from    map[string]string // where a field got its value: "FILE:LINE:COLUMN", variable or flag
	inline  []rules.Rule
	extra   map[string]func(yamltree.Node) error // keys that are read apart
	last    []rules.Rule                         // after those of all files
}

func newLoader(config any, c *Common, fields []field, flags *pflag.FlagSet, environ func(string) (string, bool)) *loader {
	if environ == nil {
		environ = func(string) (string, bool) { return "", false }
	}
	l := &loader{config: config, common: c, fields: fields, flags: flags, environ: environ, from: map[string]string{}}
	l.extra = map[string]func(yamltree.Node) error{
		"rules": func(n yamltree.Node) (err error) { l.inline, err = rules.ParseList(n); return err },
	}
	return l
}

// wrap adds to an error where the field got its value.
func (l *loader) wrap(key string, err error) error {
	if by := l.from[key]; by != "" {
		return fmt.Errorf("%s: %s: %w", by, key, err)
	}
	return fmt.Errorf("%s: %w", key, err)
}

func (l *loader) load(path, fallback string) error {
	if path == "" {
		path, _ = l.environ("FAIRLEAD_CONFIG")
	}
	optional := path == ""
	if path = cmp.Or(path, fallback); path != "" {
		data, err := l.read(path, optional)
		if err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		if err := l.file(path, data); err != nil {
			return err
		}
	}
	for i := range l.fields {
		f := &l.fields[i]
		if name, s := f.variable(l.environ); name != "" {
			l.from[f.Key] = name
			if err := f.setText(s); err != nil {
				return l.wrap(f.Key, err)
			}
		}
		if l.flags == nil {
			continue
		}
		if given := l.flags.Lookup(f.flag); given != nil && given.Changed {
			l.from[f.Key] = "--" + f.flag
			if err := f.setText(given.Value.String()); err != nil {
				return l.wrap(f.Key, err)
			}
		}
	}
	return nil
}

// file sets the fields that a configuration file names.
func (l *loader) file(path string, data []byte) error {
	root, err := yamltree.Parse(path, data)
	if err != nil || root.IsNull() {
		return err
	}
	d := yamltree.Decoder{Checks: checks(), Extra: l.extra, Found: func(key string, n yamltree.Node) { l.from[key] = n.Where() }}
	return l.hint(d.Decode(root, l.config))
}

// hint replaces the suggestion in errors about unknown keys that are a flag's name
// written as a key: dockerHost is docker.hosts.
func (l *loader) hint(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			_ = l.hint(err)
		}
		return err
	}
	at, ok := err.(*yamltree.Error) //nolint:errorlint // a mistake itself, not one of several
	for _, f := range l.fields {
		if outer, inner, nested := strings.Cut(f.Key, "."); ok && nested && at.Key == f.camel() {
			at.Reason = fmt.Sprintf("unknown key %q: want %q in the mapping %q", f.camel(), inner, outer)
		}
	}
	return err
}

// compile makes the rules, with those of the rules file, after all fields are set. The
// rules file's expose counts if it is set nowhere else. Guests says that rules may name them.
func (l *loader) compile(key string, expose *rules.HostAddress, guests bool) error {
	list := l.inline
	if path := l.common.RulesFile; path != "" {
		data, err := l.read(path, false)
		if err != nil {
			return l.wrap("rulesFile", err)
		}
		f, err := rules.Parse(path, data)
		if err != nil {
			return err
		}
		list = append(list, f.Rules...)
		if f.Expose != rules.Asked() && l.from[key] == "" {
			*expose, l.from[key] = f.Expose, path
		}
	}
	added, err := l.added(guests)
	if err != nil {
		return err
	}
	if err := rules.CheckSide(guests, list); err != nil {
		return err
	}
	set, err := rules.New(*expose, append(list, l.last...))
	if err == nil {
		set, err = set.WithRuntime(added)
	}
	l.common.Rules = set
	return err
}

// added reads the requests that were made at run time, and returns their rules. Guests says that
// they may name them.
func (l *loader) added(guests bool) ([]rules.Rule, error) {
	path := l.common.ForwardsFile
	if path == "" {
		return nil, nil
	}
	data, err := l.read(path, true)
	if errors.Is(err, fs.ErrPermission) && l.from["forwardsFile"] == "" {
		return nil, nil // that of root: this is another user, who checks a file or has an agent of their own
	}
	if err != nil {
		return nil, l.wrap("forwardsFile", err)
	}
	list, err := forwards.Parse(path, data, guests)
	return forwards.Rules(forwards.InEffect(list, time.Now())), err
}

// file is a file as it was read.
type file struct {
	path  string
	sum   [sha256.Size]byte // of its content, zero if it could not be read
	empty bool              // nothing there, or nothing in it
	apart bool              // the configuration does not depend on its content
}

// read returns the content of a file and records it. An optional one may be absent.
func (l *loader) read(path string, optional bool) ([]byte, error) {
	data, err := ReadFile(path)
	l.common.files = append(l.common.files, newFile(path, data, err, false))
	if optional && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

func newFile(path string, data []byte, err error, apart bool) file {
	if err != nil {
		return file{path: path, empty: errors.Is(err, fs.ErrNotExist), apart: apart}
	}
	return file{path: path, sum: sha256.Sum256(data), empty: len(data) == 0, apart: apart}
}

// ReadFile reads at most as much of a file as yamltree accepts.
func ReadFile(path string) (data []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(io.LimitReader(f, yamltree.MaxSize+1))
}

// File is the absolute path of the configuration file that was read, or "" if there was none.
// Programs that run elsewhere read it, too.
func (c Common) File() string {
	if len(c.files) == 0 || c.files[0].sum == ([sha256.Size]byte{}) || c.files[0].path == c.RulesFile || c.files[0].path == c.ForwardsFile {
		return ""
	}
	path := c.files[0].path
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
