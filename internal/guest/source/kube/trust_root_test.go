// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/output"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

const stranger = 12345 // a uid that is neither root's nor ours

// apiServer records the credentials that it is sent.
type apiServer struct {
	*httptest.Server
	mu   sync.Mutex
	sent []string
}

func newAPIServer(t *testing.T) *apiServer {
	s := new(apiServer)
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.sent = append(s.sent, r.Header.Get("Authorization"))
		s.mu.Unlock()
		http.Error(w, "no", http.StatusUnauthorized)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) credentials() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.sent...)
}

// kubeconfig is one that leads to a server, as a user of it.
func kubeconfig(server, user string) []byte {
	return fmt.Appendf(nil, "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]\n"+
		"users: [{name: u, user: {%s}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n", server, user)
}

// plugin makes a credential plugin, and returns it with the file that it makes when it runs.
func plugin(t *testing.T, dir string) (user, mark string) {
	t.Helper()
	path, mark := filepath.Join(dir, "plugin"), filepath.Join(dir, "mark")
	script := "#!/bin/sh\n: > " + mark + "\necho '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"from-plugin\"}}'\n"
	must(t, os.WriteFile(path, []byte(script), 0o600), os.Chmod(path, 0o700))
	return "exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: " + path + "}", mark
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestUntrustedKubeconfigRefused(t *testing.T) {
	for _, c := range []struct {
		name, want string
		spoil      func(dir, path string) error
	}{
		{"of another user", "belongs to uid 12345", func(_, path string) error { return os.Chown(path, stranger, stranger) }},
		{"writable by all", "others can write to it", func(_, path string) error { return os.Chmod(path, 0o666) }},
		{"writable by the group", "others can write to it", func(_, path string) error { return os.Chmod(path, 0o620) }},
		{"in another user's directory", "belongs to uid 12345", func(dir, _ string) error { return os.Chown(dir, stranger, stranger) }},
		{"in a directory that all can write to", "others can replace what is in it", func(dir, _ string) error { return os.Chmod(dir, 0o777) }},
		{"by another user's symbolic link", "belongs to uid 12345", func(_, path string) error {
			return errors.Join(os.Rename(path, path+".real"), os.Symlink(path+".real", path), os.Lchown(path, stranger, stranger))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, programs, dir := newAPIServer(t), t.TempDir(), t.TempDir()
			user, mark := plugin(t, programs)
			path := filepath.Join(dir, "kubeconfig")
			must(t, os.WriteFile(path, kubeconfig(server.URL, user), 0o600), c.spoil(dir, path))
			s := source(t, nil, Options{Kubeconfigs: []string{path}})
			enginetest.WantStale(t, enginetest.Run(t, s), c.want)
			if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
				t.Error("its plugin was run")
			}
			if sent := server.credentials(); len(sent) > 0 {
				t.Errorf("its server was sent %q", sent)
			}
		})
	}
}

// Root's own kubeconfig may do what that of another user may not.
func TestKubeconfigOfRootRunsItsPlugin(t *testing.T) {
	server, dir := newAPIServer(t), t.TempDir()
	user, _ := plugin(t, dir)
	path := filepath.Join(dir, "kubeconfig")
	must(t, os.WriteFile(path, kubeconfig(server.URL, user), 0o644))
	s := source(t, nil, Options{Kubeconfigs: []string{path}})
	enginetest.Run(t, s)
	wantCredential(t, server, "Bearer from-plugin")
}

func wantCredential(t *testing.T, server *apiServer, want string) {
	t.Helper()
	wait.Until(t, "the server is sent "+want, func() error {
		sent := server.credentials()
		if len(sent) == 0 || sent[len(sent)-1] != want {
			return fmt.Errorf("it was sent %q", sent)
		}
		return nil
	})
}

// Files that a kubeconfig of root names are held to the same.
func TestUntrustedKubeconfigFilesRefused(t *testing.T) {
	dir := t.TempDir()
	program, _ := plugin(t, dir)
	theirs := filepath.Join(dir, "theirs")
	must(t, os.WriteFile(theirs, []byte("x"), 0o700), os.Chown(theirs, stranger, stranger))
	for _, c := range []struct{ name, user, want string }{
		{"token", "tokenFile: " + theirs, "tokenFile: " + theirs + " belongs to uid 12345"},
		{"certificate", "client-certificate: " + theirs + ", client-key: " + theirs, "client-certificate: " + theirs + " belongs to uid 12345"},
		{"key", "client-certificate-data: eA==, client-key: " + theirs, "client-key: " + theirs + " belongs to uid 12345"},
		{"plugin", strings.Replace(program, filepath.Join(dir, "plugin"), theirs, 1), "exec: " + theirs + " belongs to uid 12345"},
		{"plugin on the PATH", strings.Replace(program, filepath.Join(dir, "plugin"), "sh", 1), `exec: program "sh": want an absolute path`},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := newAPIServer(t)
			path := filepath.Join(t.TempDir(), "kubeconfig")
			must(t, os.WriteFile(path, kubeconfig(server.URL, c.user), 0o600))
			s := source(t, nil, Options{Kubeconfigs: []string{path}})
			enginetest.WantStale(t, enginetest.Run(t, s), c.want)
			if sent := server.credentials(); len(sent) > 0 {
				t.Errorf("the server was sent %q", sent)
			}
		})
	}
}

// The token file is read, and checked, for each request.
func TestTokenFileIsCheckedAtEachRead(t *testing.T) {
	server, dir := newAPIServer(t), t.TempDir()
	token, path := filepath.Join(dir, "token"), filepath.Join(dir, "kubeconfig")
	must(t, os.WriteFile(token, []byte("first\n"), 0o600), os.WriteFile(path, kubeconfig(server.URL, "tokenFile: "+token), 0o600))
	s, err := New(Options{Kubeconfigs: []string{path}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	conf, err := s.load()
	must(t, err)
	hc := &http.Client{Transport: &bearer{token, server.Client().Transport}}
	get := func() error {
		resp, err := hc.Get(conf.rest.Host)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	must(t, get(), os.WriteFile(token, []byte("second\n"), 0o600), get(), os.Chown(token, stranger, stranger))
	if err := get(); err == nil || !strings.Contains(err.Error(), "belongs to uid 12345") {
		t.Errorf("with a token of another user: %v", err)
	}
	if sent := fmt.Sprint(server.credentials()); sent != "[Bearer first Bearer second]" {
		t.Errorf("the server was sent %s", sent)
	}
}

// A user who replaces the kubeconfig of a running agent gets nothing.
func TestSwappedKubeconfigIsRefused(t *testing.T) {
	e, server := newFake(t), newAPIServer(t)
	user, mark := plugin(t, t.TempDir())
	log := new(output.Buffer)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	f := enginetest.Run(t, source(t, e, Options{Logger: slog.New(slog.NewTextHandler(log, nil))}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	next := e.kubeconfig + ".next"
	must(t, os.WriteFile(next, kubeconfig(server.URL, user), 0o666), os.Chown(next, stranger, stranger), os.Rename(next, e.kubeconfig))
	wait.Until(t, "the new kubeconfig is refused", func() error {
		if !strings.Contains(log.String(), "belongs to uid 12345") {
			return errors.New(log.String())
		}
		return nil
	})
	if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Error("its plugin was run")
	}
}
