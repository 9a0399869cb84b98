// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// Limits of what is read, in bytes.
const (
	maxKubeconfig = 8 << 20
	maxNamed      = 1 << 20 // a file that a kubeconfig names
)

// embed reads the certificates and keys that a context names, so that client-go opens no
// file, and takes out the name of its token file, which is returned. Programs and files
// that another user can change are refused.
func embed(file *clientcmdapi.Config, name string) (tokenFile string, err error) {
	context := file.Contexts[name]
	if context == nil {
		return "", nil // client-go names what is missing
	}
	if c := file.Clusters[context.Cluster]; c != nil {
		if err := embedFile(&c.CertificateAuthority, &c.CertificateAuthorityData); err != nil {
			return "", fmt.Errorf("certificate-authority: %w", err)
		}
	}
	user := file.AuthInfos[context.AuthInfo]
	if user == nil {
		return "", nil
	}
	if err := embedFile(&user.ClientCertificate, &user.ClientCertificateData); err != nil {
		return "", fmt.Errorf("client-certificate: %w", err)
	}
	if err := embedFile(&user.ClientKey, &user.ClientKeyData); err != nil {
		return "", fmt.Errorf("client-key: %w", err)
	}
	if user.Exec != nil {
		if err := trust.Program(user.Exec.Command); err != nil {
			return "", fmt.Errorf("exec: %w", err)
		}
	}
	tokenFile, user.TokenFile = user.TokenFile, ""
	if tokenFile != "" {
		user.Token = "" // as client-go has it
		if _, err := readToken(tokenFile); err != nil {
			return "", err
		}
	}
	return tokenFile, nil
}

// embedFile replaces the name of a file by its content, unless the content is there.
func embedFile(name *string, data *[]byte) error {
	path := *name
	*name = ""
	if path == "" || len(*data) > 0 {
		return nil
	}
	b, err := trust.ReadFile(path, maxNamed)
	*data = b
	return err
}

func readToken(path string) (string, error) {
	b, err := trust.ReadFile(path, maxNamed)
	if err != nil {
		return "", fmt.Errorf("tokenFile: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return "", fmt.Errorf("tokenFile: %s is empty", path)
	}
	return token, nil
}

// withToken has each request carry the token that is in a file at that time.
func withToken(c *rest.Config, path string) {
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return &bearer{path, next} })
}

type bearer struct {
	path string
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (b *bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := readToken(b.path)
	if err != nil {
		return nil, err
	}
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	return b.next.RoundTrip(req)
}

// WrappedRoundTripper lets client-go find the transport inside.
func (b *bearer) WrappedRoundTripper() http.RoundTripper { return b.next }
